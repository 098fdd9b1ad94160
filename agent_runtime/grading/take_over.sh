# Give root the working directory and its parents. A user with write access to a parent could rename the folder and put
# another in its place.
#
# Arguments: the uid of the workspace's user, then the folders. Standard input: the folders of hidden files outside the
# working directory, where the same would replace those.
#
# The workspace's user can still read its own files, however they were saved: `mktemp` makes files that others may not
# read. Groups stay, because the user may have its access by one. Hidden files belong to root already, and keep their
# modes.
set -e
user=$1
shift
keep_readable() {
  find "$@" -user "$user" ! -type l -exec chmod go=u {} + || :
}
protect_above() {
  folder=$1
  while [ "$folder" != / ]; do
    folder=${folder%/*}
    folder=${folder:-/}
    keep_readable "$folder" -prune
    chown 0 "$folder"
    chown -h 0 "$folder"
    [ -k "$folder" ] || chmod go-w "$folder"
  done
}
for place in "$@"; do
  [ -e "$place" ] || continue
  for taken in "$place" "$(readlink -f "$place")"; do
    keep_readable "$taken"
    chown -R -h 0 "$taken"
    chmod -R a-s,go-w "$taken"
    # A user named in a default ACL could write the files that root creates here. Only an image or a setup sets such an ACL.
    ! command -v setfacl > /dev/null || setfacl -R -P -k "$taken"
    protect_above "$taken"
  done
done
while IFS= read -r outside; do
  for taken in "$outside" "$(readlink -f "$outside")"; do
    protect_above "${taken%/}/."
  done
done
