"""`MultiWorkerMirroredStrategy`, and what its workers share in `fit`."""
