"""What the store holds, for the trackers that teams look at anyway.

Fed by the job and the command line, never by the app: an app's call waits for no tracker. `records` makes plain records
of what is in the store and knows no tracker; each other module writes such records with one tracker's own client, which
it imports when it is used. What was written is noted in the store's table `sent`, so a second export writes nothing
twice.
"""
