"""The paper's figures (arXiv 2605.11005), each experiment again in our simulator: ours beside the paper's number, with a verdict.

setting.py   the one set of constants for all figures
gains.py     comparisons of what fits in memory
rows.py      a figure's rows and how they are judged
figures.py   one function a figure
output.py    CSV, text and plot
"""
