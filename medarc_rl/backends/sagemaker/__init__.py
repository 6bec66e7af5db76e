"""Submits runs to Amazon SageMaker as training jobs, and runs them inside the job."""
