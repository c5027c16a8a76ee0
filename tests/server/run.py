"""Runs the server's tests with pytest. Usage: run.py SERVE_FAKE NESTEDFP OUT_FOLDER [PYTEST ARGS...]

Exits with 77 (skipped) where the clients' packages are missing: tests/requirements-server.txt lists them."""

import importlib.util
import os
import sys

serve_fake, nestedfp, out = sys.argv[1:4]
missing = [name for name in ("pytest", "httpx", "openai") if importlib.util.find_spec(name) is None]
if missing:
    print(f"SKIPPED: the packages {', '.join(missing)} are not installed (pip install -r tests/requirements-server.txt)")
    sys.exit(77)
os.makedirs(out, exist_ok=True)
os.environ["NFP_SERVE_FAKE"] = serve_fake
os.environ["NFP_PROGRAM"] = nestedfp
os.environ["NFP_TEST_OUT"] = out
# No test takes anything of the plugins that the clients' packages bring, which take seconds to import.
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

import pytest  # noqa: E402

here = os.path.dirname(os.path.abspath(__file__))
chosen = [a for a in sys.argv[4:] if a.endswith(".py")] or [here]
chosen = [os.path.join(here, a) if not os.path.isabs(a) else a for a in chosen]
rest = [a for a in sys.argv[4:] if not a.endswith(".py")]
code = pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "--rootdir", here, *chosen, *rest])
sys.exit(0 if code == 0 else 1)
