"""The training program behind `train.py`: options, process group, run record and loop."""
