"""A job and its schedule as a crontab line, systemd's user units, and a Kubernetes CronJob. Pure: texts by file name.

All three keep secrets out: settings and keys stand in a file (or a Secret) that they only name. All three know which
exit codes are no fault: those are quiet. `retrain` locks itself, so nothing here does. What holds for the system's own
units, with a user of their own, is in `examples/deploy`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from art_patch.errors import ConfigError
from art_patch.schedule.times import Schedule

_LONGEST_LINE = 990  # Debian's cron ends a command after 1,000 characters, and says nothing
_DELAY = "5min"


@dataclass(frozen=True, slots=True)
class Job:
    """What runs, and when.

    Attributes:
        project: whose traffic is learned from.
        schedule: when.
        options: what stands behind `art-patch retrain`.
        python: absolute path of the interpreter that has art_patch.
        directory: where it runs: the app's, for checks and replayable functions are imported from there.
        variables: file with settings and keys, lines of `NAME="value"`.
        log: file that the crontab line appends to.
        limit_s: when what still runs is ended from outside; such a cycle hangs.
        quiet: exit codes besides 0 that are no fault.
    """

    project: str
    schedule: Schedule
    options: Sequence[str]
    python: Path
    directory: Path
    variables: Path
    log: Path
    limit_s: int
    quiet: Sequence[int]

    @property
    def command(self) -> tuple[str, ...]:
        """The words of the command; `-P` keeps files of the app from standing in for modules of ours."""
        return (str(self.python), "-P", "-m", "art_patch", "retrain", *self.options)

    @property
    def unit(self) -> str:
        """Name of the units, without their endings."""
        return f"art-patch-retrain-{self.project}"


def cron_line(job: Job) -> str:
    """Return the line of a crontab. What the job says goes to its log; cron mails only that it failed.

    Raises:
        ConfigError: cron would cut the line off or read it as two.
    """
    quiet = "|".join(map(str, job.quiet))
    directory, variables, log = (shlex.quote(str(path)) for path in (job.directory, job.variables, job.log))
    line = (
        f"cd {directory} && umask 077 && set -a && . {variables} && set +a"
        f" && nice -n 15 {shlex.join(job.command)} >>{log} 2>&1"
        f' || case $? in {quiet}) ;; *) echo "art-patch retrain: exit code $?, see" {log} ;; esac'
    )
    line = f"{job.schedule.as_cron()} {line.replace('%', chr(92) + '%')}"  # a bare % is a line break to cron
    if "\n" in line or len(line) > _LONGEST_LINE:
        raise ConfigError("the crontab line is too long for cron, or broken in two; use shorter paths, or --systemd")
    return f"{line}\n"


def systemd_units(job: Job) -> dict[str, str]:
    """Return the two units by file name, for the user's own systemd.

    Raises:
        ConfigError: a path holds a line break.
    """
    values = {
        "@PROJECT@": job.project,
        "@DIRECTORY@": _path(job.directory),
        "@VARIABLES@": _path(job.variables),
        "@COMMAND@": " ".join(_word(word) for word in job.command),
        "@QUIET@": " ".join(map(str, job.quiet)),
        "@LIMIT@": f"{job.limit_s}s",
        "@CALENDAR@": job.schedule.as_calendar(),
        "@DELAY@": _DELAY,
    }
    return {
        f"{job.unit}.service": _filled(_SERVICE, values),
        f"{job.unit}.timer": _filled(_TIMER, values),
    }


def cron_job(job: Job, *, image: str, home: str) -> dict[str, str]:
    """Return the manifest of a Kubernetes CronJob by file name.

    Args:
        job: paths of this machine do not enter.
        image: made from `examples/deploy/Containerfile`.
        home: where the volume with the store and the policies is mounted.
    """
    name = _dns_name(f"art-patch-retrain-{job.project}")
    values = {
        "@NAME@": name,
        "@SECRET@": _dns_name(f"art-patch-{job.project}"),
        "@SCHEDULE@": json.dumps(job.schedule.as_cron()),
        "@LIMIT@": str(job.limit_s),
        "@IMAGE@": json.dumps(image),
        "@HOME@": json.dumps(home),
        "@OPTIONS@": json.dumps(["retrain", *job.options]),
        "@QUIET@": "|".join(map(str, job.quiet)),
    }
    return {f"{name}.yaml": _filled(_CRON_JOB, values)}


def _filled(template: str, values: dict[str, str]) -> str:
    return re.sub(r"@[A-Z]+@", lambda found: values[found[0]], template)


def _path(path: Path) -> str:
    """Return a path for a setting of systemd that takes the rest of the line."""
    if "\n" in str(path):
        raise ConfigError(f"{str(path)!r} holds a line break, and a unit cannot say that; move it")
    return str(path).replace("%", "%%")


def _word(word: str) -> str:
    """Return one word of a command line, as systemd reads it."""
    if "\n" in word:
        raise ConfigError(f"{word!r} holds a line break, and a unit cannot say that; put it into a file")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[\w@%+=:,./-]+", escaped, re.ASCII) else f'"{escaped}"'


def _dns_name(name: str) -> str:
    """Return the name as Kubernetes takes it; a CronJob's may have 52 characters."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:52].strip("-")


_SERVICE = """\
# One cycle: group, score, train, gate, promote. Started by the timer of the same name, or by hand.

[Unit]
Description=art-patch: learn from the traffic of @PROJECT@ once

[Service]
Type=oneshot
# The app's: checks and replayable functions are imported from there.
WorkingDirectory=@DIRECTORY@
# Settings and keys, mode 600, lines of NAME="value".
EnvironmentFile=@VARIABLES@
ExecStart=@COMMAND@

# No fault of the job: the candidate did not win; another cycle is running; it was stopped, and goes on next time.
SuccessExitStatus=@QUIET@
# A oneshot unit has no limit by itself, and a cycle that hangs would keep the timer from starting another one.
TimeoutStartSec=@LIMIT@

# Answers come first: the job gets the processor and the disk when nobody else wants them, and is the first to go when
# memory runs out.
Nice=15
IOSchedulingClass=idle
OOMScoreAdjust=500

UMask=0077
LimitCORE=0

# What a user's own systemd can do without more rights. examples/deploy has units with a user and a file system of their
# own. MemoryDenyWriteExecute and PrivateDevices would take the GPU away.
NoNewPrivileges=yes
LockPersonality=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
"""

_TIMER = """\
[Unit]
Description=art-patch: learn from the traffic of @PROJECT@ regularly

[Timer]
OnCalendar=@CALENDAR@
# Many machines must not ask one judge in the same second.
RandomizedDelaySec=@DELAY@
# A night that the machine slept through is made up for.
Persistent=true

[Install]
WantedBy=timers.target
"""

_CRON_JOB = """\
# One cycle of art-patch at a time: group, score, train, gate, promote.
#
# It needs the claim `art-patch`, which holds the store and the policies that the server serves, and a secret with
# settings and keys:
#   kubectl create secret generic @SECRET@ --from-literal=OPENAI_API_KEY=... --from-literal=ART_PATCH_JUDGE=...
# A GPU, where the job shall have one, stands under `resources`. The schedule goes by the controller's clock.
apiVersion: batch/v1
kind: CronJob
metadata:
  name: @NAME@
  labels:
    app.kubernetes.io/name: art-patch
spec:
  schedule: @SCHEDULE@
  concurrencyPolicy: Forbid
  # A start that was missed is made up for within the hour.
  startingDeadlineSeconds: 3600
  successfulJobsHistoryLimit: 3
  failedJobsHistoryLimit: 3
  jobTemplate:
    spec:
      # A cycle that failed goes on where it stopped.
      backoffLimit: 1
      activeDeadlineSeconds: @LIMIT@
      template:
        metadata:
          labels:
            app.kubernetes.io/name: art-patch
        spec:
          restartPolicy: Never
          automountServiceAccountToken: false
          enableServiceLinks: false
          terminationGracePeriodSeconds: 60
          securityContext:
            runAsNonRoot: true
            runAsUser: 10001
            runAsGroup: 10001
            fsGroup: 10001
            fsGroupChangePolicy: OnRootMismatch
            seccompProfile:
              type: RuntimeDefault
          containers:
            - name: retrain
              image: @IMAGE@
              # Kubernetes knows no exit code but 0 that is no fault. The shell passes SIGTERM on, and then waits on.
              command:
                - /bin/sh
                - -c
                - |
                  trap 'if [ "$job" ]; then kill -TERM "$job"; else told=1; fi' TERM
                  art-patch "$@" & job=$!
                  [ "$told" ] && kill -TERM "$job"
                  wait "$job"; code=$?
                  while kill -0 "$job" 2>/dev/null; do wait "$job"; code=$?; done
                  case $code in @QUIET@) exit 0 ;; esac
                  exit "$code"
                - sh
              args: @OPTIONS@
              env:
                - name: ART_PATCH_HOME
                  value: @HOME@
              envFrom:
                - secretRef:
                    name: @SECRET@
              resources:
                requests:
                  cpu: "1"
                  memory: 4Gi
              securityContext:
                allowPrivilegeEscalation: false
                readOnlyRootFilesystem: true
                capabilities:
                  drop: [ALL]
              volumeMounts:
                - name: home
                  mountPath: @HOME@
                - name: tmp
                  mountPath: /tmp
          volumes:
            - name: home
              persistentVolumeClaim:
                claimName: art-patch
            - name: tmp
              emptyDir: {}
"""
