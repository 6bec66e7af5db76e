"""The engine: trainer, inference server and orchestrator. Import the part you need; this package loads none of them."""

import os

# Torch's threads wait for work by spinning. When processes share cores (trainer and inference on one CPU) each spin
# takes the core from a thread that has work: steps then last 20 times longer. OpenMP reads this once, when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
