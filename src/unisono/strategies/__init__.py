"""The strategies: where variables live, which devices compute."""

from unisono._backend import check_chosen_backend

# Before a module of the package imports Keras.
check_chosen_backend()
