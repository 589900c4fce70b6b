// Package network is the sandboxes' places in the host's network: which pod has which tap, by which address the host knows
// it, and what it may reach. A pod's shim claims a place for the machine, a CNI plugin or Cube itself opens it; either comes
// first, and the last of them to let go frees it. A tap is closed but between Open and Close.
//
// All that is to be remembered is in files below config.NetworkDir, each written before what it tells of is made and removed
// after that is gone, so that a process that was killed leaves nothing that the next repair doesn't find:
//
//	taps/N               the tap of that number, which is the datapath's id too, is there or in the making
//	free/N               it is ready made and nobody's: who removes the file has the tap
//	addresses/A          the address is somebody's
//	ports/P              the port of the host is the sandbox's whose id is in it, which has its address at least as long
//	attachments/ID/      whose is what, in state.json. The directory is the lock on it
//
// Every operation does its whole work in the calling process, by what is pinned: none needs a daemon but Open with ports of the
// host, which the daemon serves. The directory itself is locked by all of them, shared, and by what puts all in order, alone:
// Up, GC, Down, and the gateway's own. All happens in the network namespace of the calling thread, which is the gateway's.
//
// The package knows nothing of machines and containers but their names.
package network
