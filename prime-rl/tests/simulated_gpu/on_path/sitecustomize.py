"""Python runs this at its start if its folder is on PYTHONPATH."""

import sys

import host_gpu

host_gpu.install_with_torch()
# Its kernels run on real GPUs only, and PEFT imports it if it is installed.
sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
