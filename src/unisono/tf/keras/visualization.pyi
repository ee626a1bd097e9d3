"""Names of `tf.keras.visualization` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.visualization import (
    draw_bounding_boxes as draw_bounding_boxes,
    draw_segmentation_masks as draw_segmentation_masks,
    plot_bounding_box_gallery as plot_bounding_box_gallery,
    plot_image_gallery as plot_image_gallery,
    plot_segmentation_mask_gallery as plot_segmentation_mask_gallery,
)
