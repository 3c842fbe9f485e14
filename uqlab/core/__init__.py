"""What every room may use: networks, checks, files, devices and records.

Its files are imported by name, `from uqlab.core.files import write`, so that `runs`
starts without torch.
"""
