"""Python runs this at its start if its folder is on PYTHONPATH."""

import host_gpu

host_gpu.install_with_torch()
