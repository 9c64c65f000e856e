"""The suite with the kernels of other CPUs: ``python -m tests.cpus [what pytest takes]``, or ``make test-cpus``.

torch, oneDNN and MKL choose their kernels by the CPU they find and let variables restrict the choice. Kernels sum in
different orders, so results differ in the last bits; no test may rest on those. The variables are read once, when
torch is loaded: each setting is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
# MKL heeds MKL_ENABLE_INSTRUCTIONS on Intel's CPUs alone, MKL_CBWR everywhere.
OLDEST = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
# Workers share the cores: a thread that waits must not spin.
TWO = {"PEFTLAB_TEST_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
SETTINGS: dict[str, dict[str, str]] = {
    "this CPU's kernels, 2 threads": TWO,
    "AVX2, 1 thread": AVX2,
    "AVX2, 2 threads": AVX2 | TWO,
    "ATen without vector instructions, libraries AVX2, 2 threads": AVX2 | {"ATEN_CPU_CAPABILITY": "default"} | TWO,
    "the oldest kernels, 1 thread": OLDEST,
}


def main(arguments: list[str]) -> int:
    """Run pytest once a setting, print a summary, and return the number of settings that failed."""
    status = {}
    for name, variables in SETTINGS.items():
        shown = " ".join(f"{key}={value}" for key, value in variables.items())
        print(f"\n=== {name}: {shown}", flush=True)
        command = [sys.executable, "-m", "pytest", *arguments]
        # What inductor compiled for one setting is not for another.
        with tempfile.TemporaryDirectory() as compiled:
            environment = {**os.environ, **variables, "TORCHINDUCTOR_CACHE_DIR": compiled}
            status[name] = subprocess.run(command, env=environment, check=False).returncode
    print()
    for name, code in status.items():
        print(f"{'passed' if code == 0 else f'FAILED ({code})':12} {name}")
    return sum(code != 0 for code in status.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
