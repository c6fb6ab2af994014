"""When `art-patch retrain` runs by itself: a schedule and a job in, texts for cron, systemd and Kubernetes out. Pure.

`times` reads a schedule and writes it as each of the three wants it; `recipes` writes the crontab line, the units and
the manifest; `crontab` edits the text of a crontab; `variables` writes the file that holds settings and keys. Whatever
cannot be written faithfully is refused with `ConfigError` before anything is printed or installed.
"""
