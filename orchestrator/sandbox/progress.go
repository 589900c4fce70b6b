package sandbox

// Progress is told of a step that may take long when it begins; the function it returns, when the step has ended. nil
// is nobody who wants to know.
type Progress func(what string) (done func())

func (p Progress) step(what string) func() {
	if p == nil {
		return func() {}
	}
	return p(what)
}
