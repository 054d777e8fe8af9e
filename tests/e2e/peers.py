"""The python with torch and transformers (tests/golden/requirements.txt) that
tests compare with: $ZERO_TRANSFORMERS_PYTHON, or that of out/peers-venv, which
tools/bench/peers/setup makes, or this one."""

import os
import subprocess
import sys

VENV = os.path.abspath("out/peers-venv/bin/python")
PYTHON = os.environ.get("ZERO_TRANSFORMERS_PYTHON",
                        VENV if os.path.exists(VENV) else sys.executable)


def has_transformers():
    probe = subprocess.run([PYTHON, "-c", "import torch, transformers"],
                           capture_output=True)
    return probe.returncode == 0
