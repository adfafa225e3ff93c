"""What follows from a prediction: whether it fits, what to do, and the answers to what people ask."""
