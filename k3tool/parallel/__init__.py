"""One model on many processes: who computes what (`share`), how they talk while the model runs (`groups`), how they
start, agree, fail and end together (`world`, `link`).

A process alone is the case of one rank: the same model code runs there, with groups that have nothing to do.
"""
