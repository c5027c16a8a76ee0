"""What the documentation names exists: README.md and docs/*.md against the sources.

usage: docs_test.py SOURCE_DIRECTORY

Checked are links to files, --flags, and in `code`: paths, endpoints, and names with an underscore or a capital in the
middle. The other way round, docs/architecture.md has to show every folder of src/, and docs/models.md the lines that each
model family's file has, of which a family should need fewer than MOST_FAMILY_LINES. What `nestedfp doctor` tells of a GPU
is what docs/gpu.md has.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

# Other programs' and other people's.
FOREIGN = {"org/name", "--clock-control", "--scheduling-policy", "GGML_NATIVE", "CUDA_VISIBLE_DEVICES", "manylinux_2_28_x86_64", "startupProbe", "--compilation-config", "--enable-lora"}
MOST_FAMILY_LINES = 120
NOT_CODE = (".md", ".html", ".json", ".svg", ".jinja", ".txt")


def sources(root):
    """Paths of all files below but for those that git ignores."""
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            capture_output=True, text=True) if (root / ".git").exists() and shutil.which("git") else None
    if listed is not None and listed.returncode == 0:
        yield from (path for path in listed.stdout.split("\0") if path and (root / path).is_file())
        return
    for folder, folders, files in os.walk(root):
        here = pathlib.Path(folder).relative_to(root)
        folders[:] = [f for f in folders if f not in (".git", ".venv", ".cache", "out", "__pycache__") and not (here == pathlib.Path(".") and f.startswith("build"))]
        yield from ((here / f).as_posix() for f in files)


class Tree:
    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.paths = set(sources(self.root))
        self.paths |= {p.as_posix() for f in list(self.paths) for p in pathlib.PurePosixPath(f).parents}
        self.ends = {"/" + p for p in self.paths}
        code = [p for p in self.paths if (self.root / p).is_file() and (p.endswith("CMakeLists.txt") or not p.endswith(NOT_CODE))
                and not p.startswith(("docs/", "bench/results", "tests/docs/"))]
        self.code = "\n".join((self.root / p).read_text(errors="replace") for p in code)
        self.words = set(re.findall(r"\w+", self.code))

    def has_flag(self, flag):
        return re.search(re.escape(flag) + r"(?![a-z0-9-])", self.code) is not None

    def has_path(self, name):
        """A path from the root, or the end of one, with or without what follows its last dot."""
        return any(end == "/" + name or end.endswith("/" + name) or re.search("/" + re.escape(name) + r"\.\w+$", end) for end in self.ends)

    def missing(self, page, line):
        for target in re.findall(r"\]\(([^)#\s]+)", line):
            if "://" not in target and not (self.root / page).parent.joinpath(target).exists():
                yield f"link {target}"
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", line):
            if flag not in FOREIGN and not self.has_flag(flag):
                yield f"flag {flag}"
        for quoted in re.findall(r"`([^`]+)`", line):
            yield from self.missing_in_code(quoted)

    def missing_in_code(self, quoted):
        for match in re.finditer(r"(?<![\w~./:$-])\w+(?:/[\w.-]*\w)+", quoted):
            if quoted[match.end() : match.end() + 1] in ("-", "*"):  # a pattern
                continue
            name = match[0]
            placeholder = any(re.fullmatch("[A-Z_]+", part.split(".")[0]) for part in name.split("/"))
            if not placeholder and name not in FOREIGN and not self.has_path(name):
                yield f"path {name}"
        for endpoint in re.findall(r"(?<![\w.])/nestedfp/[\w/-]+", quoted):
            if f'"{endpoint}' not in self.code:
                yield f"endpoint {endpoint}"
        for word in re.findall(r"[A-Za-z_]\w*", quoted):
            placeholder = re.search("_[A-Z]", word) and re.search("[a-z]", word)
            if ("_" in word or re.search("[a-z][A-Z]", word)) and not placeholder and word not in self.words and word.removeprefix("D") not in self.words and word not in FOREIGN:
                yield f"name {word}"


def family_lines(root):
    """What docs/models.md's table of families gets wrong."""
    told = []
    for row in (root / "docs/models.md").read_text().split("\n"):
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) > 6 and re.search("For(CausalLM|ConditionalGeneration)", cells[2]) and cells[4]:
            told.append(int(re.match(r"\d+", cells[4])[0]))
    counted = {p.name: p.read_text().count("\n") for p in (root / "src/model/families").glob("*.cc") if p.name != "families.cc"}
    if sorted(told) != sorted(counted.values()):
        yield f"lines of families are told as {sorted(told)}, and are {counted}"
    yield from (f"{name} has {lines} lines" for name, lines in counted.items() if lines >= MOST_FAMILY_LINES)


def doctor_figures(root):
    """What src/doctor/doctor.cc tells of a GPU's step that is not the first row of docs/gpu.md's table."""
    table = re.search(r"\| decode step, ms, batch \| 1 \|.*\n.*\n\| FP16 \| ([\d.]+).*\n\| FP8 \| ([\d.]+)", (root / "docs/gpu.md").read_text())
    told = re.search(r'at ([\d.]+) ms a token in FP16, "\s*"([\d.]+) ms in FP8', (root / "src/doctor/doctor.cc").read_text())
    if table is None or told is None:
        yield "the figures of a GPU's decode step are not found"
    elif [f"{float(ms):.1f}" for ms in table.groups()] != list(told.groups()):
        yield f"a GPU's decode step takes {', '.join(told.groups())} ms, and in docs/gpu.md {', '.join(table.groups())} ms"


def main():
    tree = Tree(sys.argv[1])
    pages = ["README.md"] + sorted(p for p in tree.paths if p.startswith("docs/") and p.endswith(".md"))
    wrong = 0
    for page in pages:
        for number, line in enumerate((tree.root / page).read_text().split("\n"), 1):
            for what in tree.missing(page, line):
                print(f"{page}:{number}: {what} does not exist")
                wrong += 1
    plan = (tree.root / "docs/architecture.md").read_text()
    for folder in sorted(p for p in tree.paths if p.startswith("src/") and (tree.root / p).is_dir()):
        name = pathlib.PurePosixPath(folder).name
        if name != "testing" and "fuzz_seeds" not in folder and f"{name}/" not in plan:
            print(f"docs/architecture.md: {folder} is not there")
            wrong += 1
    for what in family_lines(tree.root):
        print(f"docs/models.md: {what}")
        wrong += 1
    for what in doctor_figures(tree.root):
        print(f"src/doctor/doctor.cc: {what}")
        wrong += 1
    print(f"{len(pages)} pages, {wrong} names that do not exist")
    return 1 if wrong or len(pages) < 2 else 0


if __name__ == "__main__":
    sys.exit(main())
