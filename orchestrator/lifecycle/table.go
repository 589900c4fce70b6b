package lifecycle

// event is what happens to a sandbox.
type event string

const (
	// What is asked for.
	evPause  event = "pause"
	evResume event = "resume"
	evSave   event = "save"   // a snapshot, or children
	evTouch  event = "touch"  // another deadline, another network
	evKill   event = "kill"   // by a user
	evExpire event = "expire" // by its deadline
	// What has become of it.
	evRuns  event = "runs"
	evStill event = "still" // it is paused to disk
	evGone  event = "gone"  // there is no machine, nor a paused one
	evUnfit event = "unfit" // what was begun with it can't be finished
)

// gone is the state of a sandbox after its last: it has no row.
const gone State = ""

// rule is what an event leads to, if its guard lets it.
type rule struct {
	to State
	// or is where it leads if the guard doesn't; gone for a rule without guard.
	guard func(*row) bool
	or    State
}

// table is all that can happen. An event without an entry is refused in that state, and changes nothing.
//
// What a state has to have done, when it is entered, is its work: see Engine.work. Creating, Pausing, Resuming, Snapshotting
// and Killing have some, and end by what has become of it.
var table = map[State]map[event]rule{
	Creating: {
		evRuns:  {to: Running},
		evUnfit: {to: Killing},
		evGone:  {to: Killing},
		evKill:  {to: Killing},
	},
	Running: {
		evPause:  {to: Pausing},
		evSave:   {to: Snapshotting},
		evTouch:  {to: Running},
		evExpire: {guard: autoPauses, to: Pausing, or: Killing},
		evKill:   {to: Killing},
		evRuns:   {to: Running},
		evStill:  {to: Paused}, // by somebody else
		evGone:   {to: Killing},
	},
	Pausing: {
		evRuns:  {to: Running},
		evStill: {to: Paused},
		evGone:  {to: Killing},
		evKill:  {to: Killing},
	},
	Paused: {
		evResume: {to: Resuming}, // maybe by somebody else
		evKill:   {to: Killing},
		evStill:  {to: Paused},
		evGone:   {to: Killing},
	},
	Resuming: {
		evRuns:  {to: Running},
		evStill: {to: Paused},
		evGone:  {to: Killing},
		evKill:  {to: Killing},
	},
	Snapshotting: {
		evTouch: {to: Snapshotting},
		evRuns:  {to: Running},
		evStill: {to: Paused},
		evGone:  {to: Killing},
		evKill:  {to: Killing},
	},
	Killing: {
		evRuns:  {to: Killing},
		evStill: {to: Killing},
		evUnfit: {to: Killing},
		evKill:  {to: Killing},
		evGone:  {to: gone},
	},
}

func autoPauses(r *row) bool { return r.AutoPause }

// next is the state that an event leads to, if it is possible.
func next(r *row, ev event) (State, bool) {
	rule, ok := table[r.State][ev]
	if ok && rule.guard != nil && !rule.guard(r) {
		return rule.or, true
	}
	return rule.to, ok
}

// busy tells whether a state has work to be done, and ends with it.
func (s State) busy() bool {
	return s != Running && s != Paused && s != gone
}
