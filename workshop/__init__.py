"""What the stage scripts need and what is not the lesson: data sets, the small model, checking options, measuring, plotting.

Nothing is imported here: ``workshop --help`` answers at once, and a script pays only for what it uses.
"""
