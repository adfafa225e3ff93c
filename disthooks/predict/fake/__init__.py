"""A model on fake tensors: how it is built and how it runs, without memory and without computing."""
