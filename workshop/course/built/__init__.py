"""The check of stage 06: its bench, the tracing of a step, and the cases for the classes of each exercise."""
