"""What is measured about rljob, one command each; README.md lists them and holds the results."""
