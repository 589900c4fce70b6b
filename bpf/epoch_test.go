package bpf

import "testing"

// TestLives: a sandbox that is suspended has its flows when it is resumed, and nothing of them when it is renewed.
func TestLives(t *testing.T) {
	s := newSandboxed(t, nil, allow("1.0.0.0/8", ""))
	first, later := udpToHost(remote, 53, 1000), udpToHost(remote, 53, 1000)
	first.edit = func(b []byte) []byte { b[l4+4] = 8; return put(ethLen+6, 0x20, 0)(b) }
	later.edit = put(ethLen+6, 0, 3)
	s.expect(s.send(udpFromGuest(remote, 1000, 53, "")), tcRedirect, TX)
	s.expect(s.send(tcpFromGuest(remote, 1000, 443, syn)), tcRedirect, TX)
	s.expect(s.local(tcpToHost(remote, 2000, 80, syn)), tcRedirect, RX)
	s.expect(s.receive(first), tcRedirect, RX)

	s.must(s.Suspend(s.id))
	s.must(s.Suspend(s.id))
	s.expect(s.send(tcpFromGuest(remote, 1000, 443, ack)), tcShot, NoSandbox)
	s.expect(s.receive(tcpToHost(remote, 443, 1000, syn|ack)), tcShot, NoSandbox)
	s.must(s.Resume(s.id))
	s.must(s.Resume(s.id))
	s.expect(s.receive(tcpToHost(remote, 443, 1000, syn|ack)), tcRedirect, RX)
	s.expect(s.receive(later), tcRedirect, RX)
	if n := len(s.flows()); n != 3 {
		t.Errorf("%d flows", n)
	}

	s.must(s.Suspend(s.id))
	s.must(s.Renew(s.id))
	s.expect(s.send(udpFromGuest(remote, 1000, 53, "")), tcShot, NoSandbox)
	s.must(s.Resume(s.id))
	if n := len(s.flows()); n != 0 {
		t.Errorf("%d flows", n)
	}
	s.expect(s.send(tcpFromGuest(remote, 1000, 443, ack)), tcRedirect, Reset)
	s.expect(s.send(tcpFromGuest(remote, 80, 2000, ack)), tcRedirect, Reset) // an answer to the host
	s.expect(s.receive(tcpToHost(remote, 443, 1000, ack)), tcShot, NoFlow)
	s.expect(s.receive(udpToHost(remote, 53, 1000)), tcShot, NoFlow)
	s.expect(s.receive(later), tcShot, Fragment)
	s.expect(s.send(tcpFromGuest(remote, 1001, 443, syn)), tcRedirect, TX)
	s.expect(s.local(tcpToHost(remote, 2001, 80, syn)), tcRedirect, RX)

	// What it had is given back to what it may have.
	var m dpMeter
	var closed uint32
	s.must(s.objs.Meters.Lookup(uint32(s.id), &m))
	s.must(s.objs.Closed.Lookup(uint32(s.id), &closed))
	if m.Opened-closed != 2 {
		t.Errorf("%d flows count", m.Opened-closed)
	}
}
