"""Problems of the package reasoning-gym (https://github.com/open-thought/reasoning-gym, Apache-2.0), with its scoring.

The package is not among the project's own: it brings some fifteen others, and an old pin of theirs must not hold ours
back. It runs in processes of an interpreter that the job may choose (``data.train.task.python``; this one, if the
package is there), and nothing of ours is imported there but ``inside.py``, which needs the standard library only.

- ``process.py``: a process makes problems, spoken to in lines of JSON. A lost or hung one is replaced and asked again.
- ``rows.py``: the problems as rows of the data, made when they are read.
- ``scoring.py``: what the sandbox is given to score answers. Several tasks evaluate the answer as Python
  (``string_insertion``, ``spiral_matrix``, ``binary_matrix``, ``n_queens`` call ``eval``; what reads formulas calls
  sympy's ``parse_expr``, which does, too), so each answer is scored by a fork of its own inside the sandbox.

A row has the question, the answer, and how the problem is made (name, configuration, seed, size, index), some 150
bytes; who scores makes the problem again. Carried along as JSON it would not be the same: most tasks have tuples, or
keys that are no text, in their metadata, and ``arc_agi`` and ``rearc`` then score a right answer as wrong. The price is
the time that it takes: mostly a millisecond or less, a quarter of a second for ``futoshiki``, two for ``knight_swap``.
A digest of the question goes along: a problem that is another one the second time is a failure, and no score.

Which problems are held out. The package's own seeds do not tell training from validation: problem ``i`` of seed ``s``
is ``Random(s + i)``'s, so that seeds 1 and 2 share all problems but one. As for the tasks of ``data/tasks.py`` a fixed
hash decides, here of the question's text: one in ten belongs to validation. Row ``i`` is problem ``i`` of the task's
seed if its question is on the right side, else that of the next of a fixed series of seeds, and so on: rows are made
in any order, of any number, and no question of a training row is ever one of validation. What is not promised is that
a question comes only once, or that two questions in other words do not mean the same.
"""
