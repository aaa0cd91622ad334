"""Predicts what a lowered schedule takes: discrete events over the same actions that the runtime executes. Imports no torch.

program.py     a lowered schedule with durations and bytes -> tasks
engine.py      tasks -> when each starts and ends; transfers that overlap share links (plan/sharing.py)
timeline.py    the times of every action, and what follows from them: busy, exposed communication, memory
bound.py       what no schedule can beat
"""
