// Package ninep serves a directory over 9P2000.L, the dialect of Linux's 9p client, to a client that is not trusted.
//
// It is written here since what exists for Go (github.com/hugelgupf/p9, which comes from gVisor) bounds neither fids nor
// requests in work, works on paths, holds locks over I/O, and leaves out what containers need.
//
// A connection is one thread of control: a request is answered before the next is read. So there is nothing to lock and
// nothing that two requests could race for, a client that doesn't read its answers waits for itself, and a connection's
// memory is two messages. What it costs, that a slow request (fsync) delays others of the same share, is little: the host's
// page cache answers most.
//
// A fid is a descriptor, opened with O_PATH one name at a time (openat2 with RESOLVE_BENEATH and no symbolic links), and
// stays with its file through any renaming. To read or write, the descriptor is opened again through /proc/self/fd, never by
// a name; only regular files and directories are opened, so that no device, fifo or socket of the host does anything. The
// client resolves symbolic links by itself, in its own name space.
//
// The client is the kernel of a container, which tells its users apart and checks what they may do. The server does what
// root in the container may: files that are made belong to the user for whom the client has attached, other owners, modes
// and times are set as asked for. It refuses what would be more than that on the host: device nodes, fifos and sockets;
// set-uid and set-gid bits of files, which go away too when a file is opened for writing; extended attributes that
// aren't user's (capabilities, labels, ACLs). Locks are granted: the client's kernel knows about all of its own, while those
// of two machines, or of a machine and the host, don't exclude each other.
package ninep
