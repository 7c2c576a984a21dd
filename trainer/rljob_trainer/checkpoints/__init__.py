"""Checkpoints: whole or not there, in a folder or in a bucket.

    checkpoint.py   what one is, and what keeps them
    folder.py       folders that get their name by one rename
    bucket.py       objects of which the manifest comes last
    finding.py      the checkpoint that a user names by a place

What is inside is the business of those who write it:

    step-00000020/
      manifest.json     format, step, files with size and digest
      driver.json       feed position, KL controller, totals, open groups
      groups.npz        tokens of groups that are begun and not trained
      ledger.sqlite     what became of every prompt
      learner/          sharded model, optimizer, scheduler and random states
"""
