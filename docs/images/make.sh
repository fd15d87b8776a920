#!/usr/bin/env bash
# Takes the screenshots of the documentation with the pages that tests/console.sh visits, and of the report that axed eval writes. Needs
# what that script needs.
#   AXED=FILE   the program (default: built here)
set -euo pipefail
cd "$(dirname "$0")/../.."
shots=$(mktemp -d)
trap 'rm -rf "$shots"' EXIT
SHOTS=$shots tests/console.sh
cp "$shots/run.png" docs/images/console-run.png
cp "$shots/run-dark.png" docs/images/console-dark.png
cp "$shots/turn.png" docs/images/console-turn.png
cp "$shots/approvals.png" docs/images/console-approvals.png
cp "$shots/evaluation.png" docs/images/console-evaluation.png
cp "$shots/eval-report.png" docs/images/eval-report.png
