"""schemathesis makes requests from /openapi.json: no server error, and every response as the document says."""

import importlib.util
import os
import subprocess
import sys

import pytest

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


# Only fuzzing goes by the seed.
@pytest.mark.parametrize("seed,phases", [(1, "examples,coverage,fuzzing"), (2, "fuzzing")])
def test_schemathesis(launch, seed, phases):
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed")
    # Short answers: a reader that is slower than this server is cut off from long ones.
    server = launch("--max-queue", 100000, "--max-num-seqs", 512, "--max-model-len", 512)
    program = os.path.join(os.path.dirname(sys.executable), "st")
    run = subprocess.run(
        [program, "run", server.url + "/openapi.json", "--checks", CHECKS, "--phases", phases,
         "--max-examples", os.environ.get("NFP_SCHEMATHESIS_EXAMPLES", "40"), "--seed", str(seed),
         "--generation-database", "none",  # whose upkeep takes half of the time, and which makes a run depend on those before
         "--request-timeout", "60", "--no-color"],
        capture_output=True, text=True, timeout=850, cwd=os.environ["NFP_TEST_OUT"])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert server.process.poll() is None
