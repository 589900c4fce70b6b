package bpf

import "fmt"

// Count is how many frames, and how many bytes in them.
type Count struct {
	Packets, Bytes uint64
}

// Counters has a count for each reason that occurred. A segmented frame counts once.
type Counters map[Reason]Count

// maxReasons is MAX_REASONS: the counters that each id has.
const maxReasons = 64

// Counters returns what was counted for a sandbox, or, of id 0, for frames of no sandbox.
func (d *Datapath) Counters(id ID) (Counters, error) {
	if id != 0 {
		_, unlock, err := d.lock(id)
		if err != nil {
			return nil, err
		}
		defer unlock()
	}
	return d.counters(id)
}

func (d *Datapath) counters(id ID) (Counters, error) {
	counters := Counters{}
	for r := range reasons {
		var each []dpCounter
		if err := d.objs.Counters.Lookup(uint32(id)*maxReasons+uint32(r), &each); err != nil {
			return nil, fmt.Errorf("read counter %s of sandbox %d: %w", Reason(r), id, err)
		}
		var sum Count
		for _, c := range each {
			sum.Packets += c.Packets
			sum.Bytes += c.Bytes
		}
		if sum.Packets > 0 {
			counters[Reason(r)] = sum
		}
	}
	return counters, nil
}

func (d *Datapath) resetCounters(id ID) error {
	zero := make([]dpCounter, d.cpus)
	for r := range reasons {
		if err := d.objs.Counters.Put(uint32(id)*maxReasons+uint32(r), zero); err != nil {
			return fmt.Errorf("reset counter %s of sandbox %d: %w", Reason(r), id, err)
		}
	}
	return nil
}
