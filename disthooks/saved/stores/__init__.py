"""The stores: where saved tensors are kept between forward and backward."""
