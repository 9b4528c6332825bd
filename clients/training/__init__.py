"""The local learner, and the section `training`: optimisers, schedules of the learning rate, augmentations, the loss."""
