#!/bin/sh
# Installs what tests/system-packages.txt asks for and this machine lacks. The services are not started: tests start their own.
set -eu
list=$(dirname "$0")/system-packages.txt
missing=''
while read -r files package; do
  case $files in ''|'#'*) continue ;; esac
  found=''
  for file in $(echo "$files" | tr '|' ' '); do [ -e "$file" ] && found=yes; done
  [ -n "$found" ] || missing="$missing $package"
done < "$list"
[ -n "$missing" ] || exit 0
root=''
[ "$(id -u)" = 0 ] || root='sudo -n'
if ! command -v apt-get >/dev/null || ! $root true 2>/dev/null; then
  echo "The tests need these packages of Debian or Ubuntu, and cannot install them without root:$missing" >&2
  echo "Install them with: sudo apt install$missing" >&2
  exit 1
fi
echo "Installing for the tests:$missing"
# A package must not start its service, nor make a database cluster, on the machine that merely runs the tests.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then printf '#!/bin/sh\nexit 101\n' | $root tee $policy >/dev/null; $root chmod 755 $policy; trap '$root rm -f $policy' EXIT; fi
$root apt-get update -qq
$root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
