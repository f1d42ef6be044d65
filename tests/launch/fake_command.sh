#!/bin/sh
# Stands in for gcloud, titans, tar, docker and xpk in the tests: replays a recorded scenario and notes what it was asked.
#
# $FAKE holds a folder for every step of the scenario, 0, 1, ..., used up in order: expect (what the command line begins
# with), contains (lines, each somewhere in it), stdout, stderr, code. Every command line is added to $FAKE/log. A
# command that is not the next step ends with code 99. Without a PATH, so only what the shell itself can do.
line="${0##*/} $*"
printf '%s\n' "$line" >>"$FAKE/log"
read -r step <"$FAKE/position"
echo $((step + 1)) >"$FAKE/position"

refuse() {
  echo "fake: step $step is not $line" >&2
  exit 99
}

[ -d "$FAKE/$step" ] || refuse
read -r expect <"$FAKE/$step/expect"
case $line in "$expect"*) ;; *) refuse ;; esac
while read -r text; do
  case $line in *"$text"*) ;; *) refuse ;; esac
done <"$FAKE/$step/contains"
while read -r text; do printf '%s\n' "$text"; done <"$FAKE/$step/stdout"
while read -r text; do printf '%s\n' "$text"; done <"$FAKE/$step/stderr" >&2
read -r code <"$FAKE/$step/code"
exit "$code"
