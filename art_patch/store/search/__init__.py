"""The index of words in the store: what a call's messages say, so that a person finds runs by their text."""
