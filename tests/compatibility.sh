#!/bin/sh
# The plug-in's tests with another Python or another release of Dagster than the pinned ones, in an environment of their own:
#   tests/compatibility.sh python3.13          the newest Dagster whose libraries are out
#   tests/compatibility.sh python3.11 1.13.21  that one
# What is tested: everything in tests/unit and tests/dagster that needs neither PyTorch nor a browser.
set -eu
python=$1
release=${2:-}
here=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "$python is not a Python 3.11 or newer that starts" >&2; exit 1; }
"$python" -m venv "$place/venv"
bin=$place/venv/bin
pins="$place/pins.txt"
# Of the pins, those of Dagster give way.
grep -v '^dagster' "$here/constraints.txt" > "$pins"
[ -z "$release" ] || echo "dagster==$release" >> "$pins"
"$bin/pip" install --quiet --disable-pip-version-check -c "$pins" "$here[dev,postgres,etcd,plots]" 2>&1 | grep -v 'is ignored' || true
"$bin/pip" check
"$bin/python" -c 'import dagster, sys; print("Python", sys.version.split()[0], "with Dagster", dagster.__version__)'
cd "$here"
PYTHONPATH="$here:$here/agent" "$bin/python" -m pytest -q -p no:cacheprovider tests/unit tests/dagster \
  --ignore tests/unit/examples --ignore tests/dagster/test_ui.py --deselect tests/dagster/test_recipes.py::test_a_gang_trains_on_two_nodes_and_reports_through_one_session -n 2 --dist loadfile
