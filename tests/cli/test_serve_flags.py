"""Every flag of `nestedfp serve` is explained in the table of docs/serving.md."""

import os
import re
import unittest

from program import main, run

DOCS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "serving.md")


class ServeFlags(unittest.TestCase):
    def test_docs_have_them_all(self):
        with open(DOCS, encoding="utf-8") as file:
            text = file.read()
        rows = [line for line in text.split("## Flags")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
        explained = set(re.findall(r"--[a-z0-9][a-z0-9-]*", " ".join(line.replace("\\|", "/").split("|")[1] for line in rows)))
        flags = set(re.findall(r"^\s*(?:-\w,)?(--[a-z0-9][a-z0-9-]*)", run("serve", "--help")[0], re.MULTILINE)) - {"--help"}
        self.assertGreater(len(flags), 30)
        self.assertEqual(sorted(flags - explained), [])
        self.assertEqual(sorted(explained - flags), [])


if __name__ == "__main__":
    main()
