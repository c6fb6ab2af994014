"""What keeps a judge from being fooled: planted answers, a search for pleas, groups asked in both orders."""
