"""The engine: trainer, inference server and orchestrator. Import the part you need; this package loads none of them."""
