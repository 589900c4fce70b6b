package bpf

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"
)

// Event is a frame that was dropped. What the frame didn't get to tell is zero.
type Event struct {
	Age        time.Duration // when it was read
	Sandbox    ID            // 0: of none
	Epoch      uint32        // tells sandboxes that had the same id apart
	Ifindex    int
	Length     int
	ToGuest    bool
	Reason     Reason
	Rule       uint16 // of the policy
	Protocol   uint8
	Remote     netip.Addr
	RemotePort uint16
	GuestPort  uint16
}

// Events reads drop events. There should be one reader: each event goes to one of them.
type Events struct {
	r *ringbuf.Reader
}

// Events opens a reader, which the caller closes.
func (d *Datapath) Events() (*Events, error) {
	r, err := ringbuf.NewReader(d.objs.Events)
	if err != nil {
		return nil, fmt.Errorf("read drop events: %w", err)
	}
	return &Events{r}, nil
}

// Read waits for the next event. os.ErrClosed once the reader is closed.
func (e *Events) Read() (Event, error) {
	record, err := e.r.Read()
	if errors.Is(err, ringbuf.ErrClosed) {
		return Event{}, os.ErrClosed
	}
	if err != nil {
		return Event{}, fmt.Errorf("read drop events: %w", err)
	}
	var raw dpEvent
	if len(record.RawSample) < int(unsafe.Sizeof(raw)) {
		return Event{}, fmt.Errorf("a drop event has %d bytes, not %d", len(record.RawSample), unsafe.Sizeof(raw))
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&raw)), unsafe.Sizeof(raw)), record.RawSample)
	ev := Event{
		Age: max(0, monotonic()-time.Duration(raw.Time)), Sandbox: ID(raw.Id), Epoch: raw.Epoch, Ifindex: int(raw.Ifindex), Length: int(raw.Length),
		ToGuest: raw.ToGuest != 0, Reason: Reason(raw.Reason), Rule: raw.Rule, Protocol: raw.Proto,
		RemotePort: port(raw.RemotePort), GuestPort: port(raw.GuestPort),
	}
	if ip := netip.AddrFrom4([4]byte(raw.RemoteIp[:4])); !ip.IsUnspecified() {
		ev.Remote = ip
	}
	return ev, nil
}

// Close ends a Read that waits.
func (e *Events) Close() error { return e.r.Close() }

// Epoch is what events tell the sandbox by that has the id; errdefs.ErrNotFound if none has.
func (d *Datapath) Epoch(id ID) (uint32, error) {
	s, unlock, err := d.lock(id)
	if err != nil {
		return 0, err
	}
	defer unlock()
	return s.Epoch, nil
}
