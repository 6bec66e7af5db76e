"""What a training job asks of SageMaker, as values, and the rules for it."""
