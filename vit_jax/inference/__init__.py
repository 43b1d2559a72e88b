"""What people do with trained weights: evaluate them, predict with them, export them."""
