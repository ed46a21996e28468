"""What experiments are made of: inputs, arms, floors, timing, and one module for each kind of experiment."""
