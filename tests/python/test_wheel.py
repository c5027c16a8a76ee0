"""test_wheel.py BUILD TINY_MODELS NFP_PORTABLE: makes the wheel of a build, lets auditwheel put into it what it needs,
installs it into a clean environment, and runs the package's tests there: this folder's and, where vLLM is, tests/vllm's."""

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
GLIBC = 28  # the newest 2.x that the wheel may ask for


def run(*command, **options):
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, **options)


def main() -> None:
    build, tiny_models, portable = sys.argv[1:4]
    try:
        import auditwheel  # noqa: F401
        import numpy
        import scikit_build_core  # noqa: F401
    except ImportError as missing:
        print(f"skipped: {missing.name} is not installed (scripts/test installs it)")
        sys.exit(77)
    tools = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
        environment.pop("PYTHONPATH", None)
        run(sys.executable, "-m", "pip", "wheel", ROOT / "python", "--quiet", "--no-deps", "--no-build-isolation",
            "--disable-pip-version-check", "-C", f"cmake.define.NESTEDFP_BUILD={build}", "-C", f"build-dir={work}/cmake",
            "-w", work / "plain", env=environment)
        (plain,) = (work / "plain").glob("*.whl")
        run(sys.executable, "-m", "auditwheel", "repair", "-w", work / "dist", plain, env=environment)
        (wheel,) = (work / "dist").glob("*.whl")
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
        tag = re.fullmatch(r"nestedfp-[0-9.]+-py3-none-manylinux_2_(\d+)_\w+(\.manylinux\w+)*\.whl", wheel.name)
        if not tag or (portable == "ON" and int(tag[1]) > GLIBC):
            run(sys.executable, "-m", "auditwheel", "show", plain, env=environment)
            sys.exit(f"{wheel.name}: expected one wheel for every Python 3 and for glibc 2.{GLIBC} or older")
        venv.create(work / "env", with_pip=True)
        python = work / "env" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"numpy=={numpy.__version__}",
            wheel, env=environment)
        environment["NFP_TINY_MODELS"] = tiny_models
        environment["NFP_SOURCE"] = str(ROOT)
        run(python, "-m", "unittest", "discover", "-s", HERE, "-p", "test_[!w]*.py", cwd=work, env=environment)
        print("The plugin for vLLM (what needs vLLM or a GPU says that it was skipped):", flush=True)
        run(python, "-m", "unittest", "discover", "-v", "-s", ROOT / "tests" / "vllm", cwd=work, env=environment)


if __name__ == "__main__":
    main()
