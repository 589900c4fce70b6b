// Package ports has ports of the host lead to ports of sandboxes. The daemon's Server accepts what comes to them and passes it
// on, by connections of the host's own, which is what the datapath lets in. Nobody else does: mapped ports end with the
// daemon, and the next one has them again.
//
// Who has which port is written down by others, a file each. A Server reaches a sandbox only while that file is there: an
// address that has become another sandbox's is never dialled. It binds what it is told to and nothing else.
//
// The package knows nothing of sandboxes but addresses.
package ports
