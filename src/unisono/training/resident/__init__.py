"""Arrays that stay on the devices during a call of `fit` and the like, whose steps choose rows of them."""
