"""The handwritten-digits loop: real images in, a trained classifier, a service with two replicas, predictions out."""
