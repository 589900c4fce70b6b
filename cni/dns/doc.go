// Package dns is the forwarder that answers sandboxes' name lookups: by UDP and TCP, at the gateway's address, to which all
// that sandboxes send to port 53 is redirected. It asks the name servers of the host, or configured ones, and keeps nothing.
//
// Sandboxes are hostile: each has so many queries a second and in flight and so many connections, and what is no plain
// question for a name is refused. They have no IPv6, so that there are no addresses of it in answers. Names aren't logged
// but for debugging.
package dns
