"""What `training` of a configuration names: optimisers, schedules of the learning rate, augmentations, the task's loss."""
