"""Functions in the place of others (patches.py), on classes of the test's own. Needs neither vLLM nor a GPU."""

import types
import unittest

from nestedfp.vllm.patches import around


class Around(unittest.TestCase):
    def setUp(self):
        class Loader:
            def load(self, name, twice=False):
                """Loads."""
                return [name] * (2 if twice else 1)

        self.loader = Loader

    def patch(self, owner, name="load"):
        @around(owner, name)
        def load(original, *args, **kwargs):
            return ["before", *original(*args, **kwargs), "after"]

    def test_a_method(self):
        self.patch(self.loader)
        self.assertEqual(self.loader().load("a", twice=True), ["before", "a", "a", "after"])
        self.assertEqual((self.loader.load.__name__, self.loader.load.__doc__), ("load", "Loads."))

    def test_once(self):
        for _ in range(3):
            self.patch(self.loader)
        self.assertEqual(self.loader().load("a"), ["before", "a", "after"])

    def test_a_class_that_inherits_it_has_it_once(self):
        class Other(self.loader):
            pass

        class Own(self.loader):
            def load(self, name):
                return ["own", *super().load(name)]

        self.patch(self.loader)
        self.patch(Other)
        self.assertNotIn("load", vars(Other))
        self.assertEqual(Other().load("a"), ["before", "a", "after"])
        self.patch(Own)
        self.assertEqual(Own().load("a"), ["before", "own", "before", "a", "after", "after"])

    def test_a_function_of_a_module(self):
        module = types.ModuleType("utils")
        module.load = lambda name: [name]
        self.patch(module)
        self.patch(module)
        self.assertEqual(module.load("a"), ["before", "a", "after"])

    def test_a_generator_begins_when_it_is_asked(self):
        begun = []

        class Reader:
            def read(self):
                begun.append(True)
                yield 1

        @around(Reader, "read")
        def read(original, self):
            yield from original(self)
            yield 2

        made = Reader().read()
        self.assertEqual(begun, [])
        self.assertEqual(list(made), [1, 2])

    def test_errors_pass_through(self):
        class Refuses:
            def load(self):
                raise ValueError("no")

        self.patch(Refuses)
        with self.assertRaisesRegex(ValueError, "^no$"):
            Refuses().load()

    def test_what_is_not_there_is_an_error(self):
        with self.assertRaises(AttributeError):
            self.patch(self.loader, "unload")


if __name__ == "__main__":
    unittest.main(verbosity=1)
