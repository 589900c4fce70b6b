package lifecycle

import (
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/admission"
)

// Capacity is what there is room for.
type Capacity struct {
	admission.Reading
	// CPUsUsed is how many CPUs of the host are busy.
	CPUsUsed float64
	// Total is what can be reserved, Reserved what is, Spare the part of that for machines that are kept ready.
	Total, Reserved, Spare admission.Amount
	// Running and Paused are of all teams.
	Running, Paused int
	// Use is the team's, Limits what it may have.
	Use    admission.Use
	Limits config.Limits
	// Rooms are those of the shapes that were asked for.
	Rooms []Room
}

// Room is how many more sandboxes of a shape a team can have.
type Room struct {
	// Reserved is what is set aside for each.
	Reserved admission.Amount
	Count    int
	// Short is what there is too little of for another one, as refusals name it.
	Short string
}

// Capacity tells a team what there is room for.
func (e *Engine) Capacity(team string, shapes []admission.Shape) (c Capacity, err error) {
	if err := e.Ready(); err != nil {
		return c, err
	}
	if c.Reading, err = e.Host.Read(); err != nil {
		return c, err
	}
	if c.CPUsUsed, err = e.Host.CPUUsed(); err != nil {
		return c, err
	}
	totals := e.ledger.Totals()
	c.Total, c.Reserved, c.Spare = admission.Capacity(e.Admission, c.Reading), totals.Reserved, totals.Spare
	for _, use := range totals.Teams {
		c.Running += use.Running
		c.Paused += use.Paused
	}
	c.Use = totals.Teams[team]
	c.Limits, _ = e.Limits.Of(team)
	left := e.left(e.life, c.Reading)
	for _, s := range shapes {
		r := Room{Reserved: admission.Need(e.Admission, s)}
		r.Count, r.Short = e.ledger.Room(team, s, c.Reading, left)
		c.Rooms = append(c.Rooms, r)
	}
	return c, nil
}
